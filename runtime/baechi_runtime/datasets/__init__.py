"""Making the families of graphs that baechi_ext.datasets loads."""
