"""Routers in files: fetching a folder, the card in it, saving and loading, publishing."""
