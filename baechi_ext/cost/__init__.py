"""Costs of ops and transfers: profiles, and the line through a link's samples."""

from baechi_ext.cost.communication import LinkFit, bend_bytes, fit_link
from baechi_ext.cost.factors import scale_links, vary_costs
from baechi_ext.cost.profile import Contention, OpProfile, Profile, attach_costs

__all__ = ["Contention", "LinkFit", "OpProfile", "Profile", "attach_costs", "bend_bytes", "fit_link", "scale_links", "vary_costs"]
