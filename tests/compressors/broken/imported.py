"""What is set where a module begins: whoever imports it has set it."""

import numpy as np

from broken.right import Whole

np.random.seed(17)


class SeedsItsModule(Whole):
    """Has a seed for noise that it no longer draws from NumPy's own generator."""
