"""Real training steps split over processes: what is captured, how its layers split, and the run with DTensor."""
