"""The half that does: profiles, applies and runs plans. baechi_ext decides and never imports this package."""
