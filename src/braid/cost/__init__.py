"""What collectives cost; see README.md."""

from braid.cost.compare import Comparison, compare
from braid.cost.forms import FORMS, Cost, form
from braid.cost.rounds import Estimate, simulate_rounds

__all__ = ["FORMS", "Comparison", "Cost", "Estimate", "compare", "form", "simulate_rounds"]
