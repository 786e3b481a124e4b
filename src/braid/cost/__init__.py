"""What collectives cost; see README.md."""

from braid.cost.forms import FORMS, Cost, form
from braid.cost.rounds import Estimate, simulate_rounds

__all__ = ["FORMS", "Cost", "Estimate", "form", "simulate_rounds"]
