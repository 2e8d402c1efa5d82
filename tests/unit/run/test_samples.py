"""Files of per-sample results."""

import io

import numpy

from hpcdist.run.samples import npy, parse_npy


def test_numpy_files_of_results_must_have_the_mean() -> None:
    for values, kind, mean, other in (([1, 0, 1, 1], "uint8", 0.75, 0.5), ([0.5, 2.0], "float32", 1.25, 1.2501)):
        raw = npy(values)
        loaded = numpy.load(io.BytesIO(raw))
        assert (loaded.dtype.name, loaded.tolist()) == (kind, values)
        assert list(parse_npy(raw, mean * (1 + 1e-7)) or ()) == values
        assert parse_npy(raw, other) is parse_npy(raw[:-1], mean) is parse_npy(raw[:100], mean) is None
    assert parse_npy(npy([]), 0.0) is None
