"""Plans on groups of devices, run: each group runs its calls of the forward graph, split over its processes; what crosses is sent."""
