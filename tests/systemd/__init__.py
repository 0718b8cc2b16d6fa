"""hicached as a service: no systemd runs here, so tests play the service manager, and apply its restrictions."""
