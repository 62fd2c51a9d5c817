from __future__ import annotations

import pytest

from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.keep_all import KeepAll
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV


def test_a_method_that_never_evicts_is_refused_before_it_runs() -> None:
    with pytest.raises(UserError, match="snapkv never evicts with prefill=off and interval=null"):
        SnapKV(prefill="off").check_budget(Budget(100))
    SnapKV(prefill="off").check_budget(Budget(None))  # nothing has to leave
    SnapKV(prefill="off", interval=1).check_budget(Budget(100))
    RKV(prefill="off").check_budget(Budget(100))
    KeepAll().check_budget(Budget(100))
