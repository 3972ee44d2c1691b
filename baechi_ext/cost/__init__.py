"""Costs of ops and transfers: profiles, and the line through a link's samples."""

from baechi_ext.cost.communication import LinkFit, bend_bytes, fit_link
from baechi_ext.cost.factors import scale_links, vary_costs
from baechi_ext.cost.hardware import HARDWARE, Hardware, costs_on, hardware_named
from baechi_ext.cost.profile import Contention, OpProfile, Profile, attach_costs

__all__ = ["HARDWARE", "Contention", "Hardware", "LinkFit", "OpProfile", "Profile"]
__all__ += ["attach_costs", "bend_bytes", "costs_on", "fit_link", "hardware_named", "scale_links", "vary_costs"]
