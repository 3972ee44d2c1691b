"""`baechi doctor`: what of this installation works, what is missing, and what that costs. The process that asks imports nothing that may
crash: what has to be tried is tried in a process of its own."""
