"""One command a file: its options, what it calls, what it prints. `vmoer.cli` imports a file when its command is called."""
