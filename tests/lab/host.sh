#!/usr/bin/env bash
# Boot one lab host: a systemd of its own over an overlay of this machine's files.
# usage: host.sh NAME NETNS DISK KEYS CGROUP [BOUND_FOLDER...]
#   DISK    a mounted tmpfs that keeps the host's files from one boot to the next
#   KEYS    folder with client.pub and NAME.hostkey
#   CGROUP  the cgroup v2 folder that the whole host lives in; killing it is a crash
set -eu
name=$1 netns=$2 disk=$3 keys=$4 cgroup=$5
shift 5
echo $$ > "$cgroup/cgroup.procs"
exec setsid unshare --mount --propagation private bash -eu -c '
name=$1 netns=$2 disk=$3 keys=$4
shift 4
# systemd inside wants cgroup v2 alone, whatever the machine around it has.
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p "$disk/upper" "$disk/work" "$disk/root"
root=$disk/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$disk/upper,workdir=$disk/work" "$root"
if [ ! -e "$disk/installed" ]; then
  tr -d - < /proc/sys/kernel/random/uuid > "$root/etc/machine-id"
  echo "$name" > "$root/etc/hostname"
  printf "127.0.0.1 localhost\n127.0.1.1 %s\n" "$name" > "$root/etc/hosts"
  rm -f "$root/etc/resolv.conf"
  : > "$root/etc/resolv.conf"
  for unit in nftables.service cron.service ssh.socket getty.target console-getty.service \
      systemd-timesyncd.service e2scrub_reap.service apt-daily.timer apt-daily-upgrade.timer \
      e2scrub_all.timer fstrim.timer postgresql.service; do
    ln -sfn /dev/null "$root/etc/systemd/system/$unit"
  done
  # systemd --user runs from the boot on, without a login.
  mkdir -p "$root/var/lib/systemd/linger"
  : > "$root/var/lib/systemd/linger/root"
  rm -f "$root"/etc/ssh/ssh_host_*
  install -m 600 "$keys/$name.hostkey" "$root/etc/ssh/ssh_host_ed25519_key"
  mkdir -p "$root/etc/ssh/sshd_config.d"
  printf "MaxStartups 100:30:200\nMaxSessions 50\nPermitRootLogin prohibit-password\n" \
    > "$root/etc/ssh/sshd_config.d/lab.conf"
  : > "$disk/installed"
fi
mount -t tmpfs -o mode=700 tmpfs "$root/root"
install -d -m 700 "$root/root/.ssh"
install -m 600 "$keys/client.pub" "$root/root/.ssh/authorized_keys"
binds=()
for folder in "$@"; do binds+=("--bind-ro=$folder"); done
exec systemd-nspawn -D "$root" --boot --register=no --keep-unit --machine="$name" \
  --hostname="$name" --console=pipe --resolv-conf=off --link-journal=no \
  --network-namespace-path="/run/netns/$netns" "${binds[@]}"
' lab "$name" "$netns" "$disk" "$keys" "$@"
