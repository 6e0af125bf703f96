"""Two real systemd hosts on one machine, for the tests that need real scopes, tmux and ssh."""
