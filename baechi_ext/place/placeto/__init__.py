"""Placeto (Addanki et al., NeurIPS 2019): a learned policy that visits op after op and moves each to a better device."""
