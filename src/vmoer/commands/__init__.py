"""One command a file: its options, what it calls, what it prints. Heavy imports happen inside; `vmoer.cli` registers them."""
