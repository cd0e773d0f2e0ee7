"""Names for the types of NumPy arrays."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
ScoreArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int32]
