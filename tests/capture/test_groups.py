"""Names of colocation groups."""

from baechi_ext.capture.groups import Groups
from baechi_ext.ir import Op


def test_a_group_without_a_name_is_not_called_as_one_that_has_it() -> None:
    groups = Groups()
    groups.join(0, "outputs")  # a parameter's name, and the id of the second op
    groups.join(1, 2)
    labelled = groups.labelled([Op("a"), Op("outputs"), Op("b"), Op("c")])
    assert [op.colocation for op in labelled] == ["outputs", "outputs'", "outputs'", None]
