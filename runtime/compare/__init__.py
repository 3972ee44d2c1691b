"""`baechi compare`: steps placed by several methods, each predicted and really measured, all in turn."""
