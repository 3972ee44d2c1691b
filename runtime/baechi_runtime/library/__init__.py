"""The library's front door: what `baechi_ext` hands out, and users hold. The command line is a thin layer over the same stages."""

from baechi_ext.explain import OpChoices as OpChoices
from baechi_ext.explain import PlanExplanation as PlanExplanation
from baechi_ext.ir import Cluster as Cluster
from baechi_ext.ir import Device as Device
from baechi_ext.ir import Link as Link
from baechi_ext.ir import Op as Op
from baechi_ext.ir import OpGraph as OpGraph
from baechi_ext.ir import Plan as Plan
from baechi_ext.ir import Tensor as Tensor
from baechi_ext.simulate import Timeline as Timeline
from baechi_ext.simulate import Transfer as Transfer
from baechi_runtime.library.run import Compared as Compared
from baechi_runtime.library.run import Run as Run
from baechi_runtime.report.call_report import CallReport as CallReport
from baechi_runtime.report.explaining import Explained as Explained
