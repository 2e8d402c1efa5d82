"""Per-sample results of an evaluation, in the file `samples.npy` of a checkpoint.

Two runs are compared sample by sample with them. The files are written and read without numpy, which the ranks' Python
may lack.
"""

import statistics
from array import array
from collections.abc import Sequence

#: Limit of per-sample results.
MAX_RESULTS = 1_000_000
#: Length of the header of a file that `npy` writes.
HEAD_BYTES = 128


#: Tolerance of the mean of float results, relative to it: float32 has about seven digits.
_MEAN_TOLERANCE = 1e-5


def _npy_head(kind: str, num: int) -> bytes:
    """Return the header of an .npy file with `num` values of NumPy's type `kind`."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({num},), }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + f"{text:<117}\n".encode()


def npy(values: Sequence[float]) -> bytes:
    """Return an .npy file of per-sample results: uint8 if all are 0 or 1, else float32 [n]."""
    if {*values} <= {0, 1}:
        return _npy_head("|u1", len(values)) + bytes(map(int, values))
    return _npy_head("<f4", len(values)) + array("f", values).tobytes()


def parse_npy(raw: bytes, mean: float) -> Sequence[float] | None:
    """Return the results in a file of `npy`; None if it is another file, or their mean is not `mean`."""
    for kind, code in ("|u1", "B"), ("<f4", "f"):
        num, rest = divmod(len(raw) - HEAD_BYTES, array(code).itemsize)
        if num <= 0 or rest or raw[:HEAD_BYTES] != _npy_head(kind, num):
            continue
        values: Sequence[float] = array(code, raw[HEAD_BYTES:])
        tolerance = _MEAN_TOLERANCE * abs(mean)
        if code == "B":
            # The trainer may have rounded the mean otherwise, but by less than one correct sample.
            tolerance = 0.5 / num
        if abs(statistics.fmean(values) - mean) < tolerance:
            return values
        return None
    return None
