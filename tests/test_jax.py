"""ringcomm.jax: its results are those of numpy arrays, in jit and out of it; a model trains; what
fails says so. The cases are in jax_ranks.py, which two and four processes run."""

from __future__ import annotations

import functools
import importlib.util
import json

import pytest
from patience import SILENCE
from ranks import run_processes

if importlib.util.find_spec("jax") is None:
    pytest.skip("not installed: pip install '.[frameworks]'", allow_module_level=True)

BY_ONE = (  # those for which it makes no difference how many ranks there are
    "nothing_is_copied",
    "results_lie_where_their_arrays_do",
    "what_cannot_work_is_refused",
)
TOGETHER = (
    "an_array_has_the_bits_of_numpys",
    "a_tree_has_the_bits_of_numpys",
    "a_mean_of_whole_numbers_is_numpys",
    "compressed_it_has_the_bits_of_numpys",
    "feedback_goes_from_call_to_call",
    "collectives_keep_their_order",
    "in_control_flow",
    "a_model_trains_as_one_process_does",
    "the_page_says_how",
    "errors_of_collectives_reach_the_caller",
    "a_death_raises",  # the last, as it ends the job
)
CASES = {2: (*BY_ONE, *TOGETHER), 4: TOGETHER}


@functools.cache
def outcomes(n: int) -> list[dict[str, str]]:
    """How each case ended, by rank."""
    settings = {"RINGCOMM_PEER_TIMEOUT": str(SILENCE), "RINGCOMM_TIMEOUT": str(SILENCE)}
    code = f"import jax_ranks; jax_ranks.run({CASES[n]})"
    return [json.loads(one.stdout) for one in run_processes(n, code, env=settings)]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "case"), [(n, case) for n in CASES for case in CASES[n]])
def test_jax(n: int, case: str) -> None:
    ends = [rank.get(case, "not reached") for rank in outcomes(n)]
    assert ends == [""] * n, "\n".join(ends)
