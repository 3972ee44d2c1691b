"""Reports for people and as JSON: tables, plots, traces, the page of a run."""
