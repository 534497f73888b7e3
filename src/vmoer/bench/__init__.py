"""What the methods cost on a machine: whole models at true geometries, and one router by itself."""
