"""A status difference, applied by the letter of RFC 7386, gives the new status."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_operator.runtime.status_patch import difference

VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
STATUSES = st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=STATUSES, new=STATUSES)
def test_the_difference_makes_the_old_status_the_new_one(merged, old, new):
    assert merged(old, new) == new


@given(status=STATUSES)
def test_equal_statuses_have_no_difference(status):
    assert difference(status, status) == {}
