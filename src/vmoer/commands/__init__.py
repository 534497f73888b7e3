"""Commands that need more than a few lines, one file each; `vmoer.cli` registers them."""
