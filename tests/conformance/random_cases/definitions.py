"""Random changes of definitions: of publications, replica identities, partitions and columns.

Each is drawn without regard to those before: what the publisher refuses is left out, as it is of changes of
rows. Not drawn is what makes a native subscriber stand still, or go on without a change (R8.9, R8.11):
another name of a table, a column that subscribers lack, another replica identity of a table without a key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from conformance.random_cases.publications import ACTIONS, Members, Publication, Style
from conformance.random_cases.tables import Family, Identity, Layout, Table
from conformance.random_cases.values import quoted

LATER: Final = "later"
"""A column of subscribers' tables that the publisher's have now and then, with 5 in it."""


def with_later_column(family: Family, layout: Layout) -> Iterator[str]:
    """The statements that add the column to a subscriber's tables."""
    tables = (family.top,) if layout is Layout.SAME else family.tables
    for table in tables:
        yield f"alter table {table.sql} add column {quoted(LATER)} int"


@dataclass(frozen=True, slots=True)
class Definitions:
    """Draws statements that change definitions."""

    choose: random.Random
    families: Sequence[Family]
    publications: Sequence[Publication]
    style: Style

    def change(self, family: Family, table: Table) -> str:
        """A statement about a table of a family, or about a publication."""
        if self.choose.random() < 0.45:
            return self._of_publication(self.choose.choice(self.publications), table)
        draw = self.choose.choices(tuple(OF_TABLES), tuple(OF_TABLES.values()))[0]
        return draw(self, family, table)

    # ---- publications

    def _of_publication(self, publication: Publication, table: Table) -> str:
        change = self.choose.choice((f"add table {table.sql}", f"drop table {table.sql}", None, None))
        if change is None:
            change = self.choose.choice((self._other_tables, self._other_options))(publication)
        return f"alter publication {quoted(publication.name)} {change}"

    def _other_tables(self, publication: Publication) -> str:
        """Other tables, or the same with other filters and lists."""
        drawn = Members(self.choose, publication.actions, publication.via_root, self.style)
        return f"set {', '.join(f'table {member.clause}' for member in drawn.members(self.families))}"

    def _other_options(self, _: Publication) -> str:
        if self.choose.random() < 0.6:
            return f"set (publish_via_partition_root = {self.choose.choice(('true', 'false'))})"
        few = self.choose.sample(ACTIONS, self.choose.randint(2, 4))
        return f"set (publish = '{', '.join(self.choose.choice((few, ACTIONS)))}')"

    # ---- tables

    def identity(self, family: Family, table: Table) -> str:
        """REPLICA IDENTITY FULL, or the key: a subscriber finds rows by either."""
        if not family.key or Identity.INDEX in {each.identity for each in family.tables}:
            return self.rewrite(family, table)
        return f"alter table {table.sql} replica identity {self.choose.choice(('full', 'default'))}"

    def partition(self, family: Family, table: Table) -> str:
        """A partition leaves its tree, or comes back."""
        partitions = [each for each in family.tables if each.bound]
        if not partitions:
            return self.rewrite(family, table)
        one = self.choose.choice(partitions)
        change = self.choose.choice(
            (f"detach partition {one.sql}", f"attach partition {one.sql} {one.bound}")
        )
        return f"alter table {one.parent} {change}"

    def column(self, family: Family, table: Table) -> str:
        """A column comes, goes, or exchanges its name with another."""
        if not family.key:
            return self.rewrite(family, table)
        exchange = (("n", "m"), (LATER, "n"), ("m", LATER))
        changes = (
            [f"add column {quoted(LATER)} int default 5"],
            [f"drop column {quoted(LATER)}"],
            [f"rename column {quoted(old)} to {quoted(new)}" for old, new in exchange],
        )
        return "; ".join(f"alter table {family.top.sql} {each}" for each in self.choose.choice(changes))

    def rewrite(self, family: Family, _: Table) -> str:
        """A column is stored in another way, which rewrites the table (R9.3), or as before."""
        return f'alter table {family.top.sql} alter "n" type {self.choose.choice(("bigint", "int"))}'


OF_TABLES: Final[Mapping[Callable[[Definitions, Family, Table], str], int]] = {
    Definitions.identity: 5,
    Definitions.partition: 6,
    Definitions.column: 6,
    Definitions.rewrite: 2,
}
"""Changes of tables, and how often they are drawn."""
