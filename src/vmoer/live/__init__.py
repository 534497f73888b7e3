"""A method on a model in memory: attaching, which pass a router is in, what is recorded, what is fitted."""
