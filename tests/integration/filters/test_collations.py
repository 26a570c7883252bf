"""Text compared under all kinds of collations and in databases of other encodings and locales (R3.16)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from cdc_replay.filters.compile import ArrowFilter, compile_filter
from cdc_replay.filters.rules import UTF8_COLLATIONS
from cdc_replay.postgres.connection import connect
from embedded.postgres import Cluster
from fixtures.postgres import Database, create_database, drop_database
from fixtures.stored_filters import FilteredTable
from integration.filters.test_filters_equal_postgresql import as_server_filter, assert_same, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

WORDS = ("a", "A", "b", "B", "ab", "aB", "a b", "a-b", "á", "Á", "ä", "ae", "z", "Z", "ß", "ss", "é",
         "e\u0301", "ÿ", "_", "", " ", "10", "9", "ñ", "nz")  # fmt: skip
ENCODINGS = {"UTF8": WORDS, "LATIN1": tuple(word for word in WORDS if word != "e\u0301"), "SQL_ASCII": WORDS}


def fill(database: Database, words: tuple[str, ...], collation: str = "") -> FilteredTable:
    clause = sql.SQL("collate {}").format(sql.Identifier(collation)) if collation else sql.SQL("")
    with database.connect() as connection:
        connection.execute(
            sql.SQL("create table t (id int primary key, s text {}, s2 text {}, c char(4) {})").format(
                clause, clause, clause
            )
        )
        with connection.cursor() as cursor, cursor.copy("copy t from stdin") as copy:
            for number, word in enumerate((*words, None)):
                copy.write_row((number, word, words[number * 7 % len(words)], word))
    return FilteredTable(database)


def check(filtered: FilteredTable, spark: SparkSession, texts: list[str]) -> list[str]:
    """Compare ours with PostgreSQL's, both ways where both exist; returns what Arrow answers."""
    stored = filtered.store(texts)
    table = filtered.table()
    compiled = [compile_filter(row_filter, table) for row_filter in stored]
    rows, truth = rows_of(filtered, spark), filtered.answers(stored)
    on_server = [as_server_filter(row_filter, table) for row_filter in stored]
    assert_same(texts, rows.server_answers(on_server, filtered.database.dsn), truth)
    exact = [position for position, result in enumerate(compiled) if isinstance(result, ArrowFilter)]
    in_arrow = rows.arrow_answers([result for result in compiled if isinstance(result, ArrowFilter)])
    assert_same(
        [texts[position] for position in exact],
        in_arrow,
        [tuple(row[position] for position in exact) for row in truth],
    )
    return [texts[position] for position in exact]


@pytest.mark.parametrize(
    "collation", ["C", "POSIX", "ucs_basic", "pg_c_utf8", "unicode", "und-x-icu", "de-x-icu", "C.utf8"]
)
def test_text_under_each_collation_has_postgresqls_answers(
    publisher: Database, spark: SparkSession, collation: str
) -> None:
    try:
        filtered = fill(publisher, WORDS, collation)
        publisher.rows("select max(s) from t")
    except (psycopg.errors.UndefinedObject, psycopg.errors.FeatureNotSupported) as error:
        pytest.skip(f"this server: {error.diag.message_primary}")
    equalities = ["s = 'a'", "s <> 'é'", "s in ('ß', 'A', '')", "c = 'ab '", "s like 'a%'", "s not like '%b'"]
    orders = ["s < 'b'", "s >= 'a b'", "greatest(s, 'b') = 'b'", "c <= 'a'", "s between 'A' and 'b'"]
    others = ["s > 'é'", "s < s2", "s = s2", "upper(s) = 'Á'", "s ilike 'Á'", "s ~ '^[a-z]$'"]

    in_arrow = check(filtered, spark, [*equalities, *orders, *others])

    [(oid,)] = publisher.rows(f"select oid::int from pg_collation where collname = '{collation}'")
    if oid in UTF8_COLLATIONS:  # 15 has another ucs_basic
        assert in_arrow == [*equalities, *orders, "s > 'é'", "s < s2", "s = s2"]
    elif collation in {"C", "POSIX"}:
        assert in_arrow == [*equalities, *orders]
    else:
        assert in_arrow == equalities


@pytest.fixture(params=ENCODINGS)
def encoded(request: pytest.FixtureRequest, publisher_cluster: Cluster) -> Iterator[FilteredTable]:
    """A database of another encoding, which the values on the wire no longer show."""
    name = f"encoded_{request.param}".lower()
    with connect(publisher_cluster.dsn(), purpose="test") as admin:
        admin.execute(
            sql.SQL("create database {} encoding {} template template0 locale 'C'").format(
                sql.Identifier(name), request.param
            )
        )
    database = Database(publisher_cluster, name)
    yield fill(database, ENCODINGS[request.param])
    drop_database(database)


def test_text_in_each_encoding_has_postgresqls_answers(encoded: FilteredTable, spark: SparkSession) -> None:
    """In SQL_ASCII a character is a byte, so é has two, and _ stands for one of them."""
    always = ["s = 'a'", "s in ('ss', 'A', '')", "s like 'a%'", "c = 'ab '", "s like any (array['%b', 'z'])"]
    not_ascii = ["s = 'é'", "s <> 'ß'", "s like '%é%'", "s in ('ä', 'a')", "s = 'Ã©'"]
    on_server = ["s like '_'", "s < 'b'", "s < s2", "s = s2", "length(s) = 1", "s collate \"C\" > 'é'"]
    in_c = ["s collate \"C\" < 'b'", "s collate \"C\" >= 'a b'"]

    in_arrow = check(encoded, spark, [*always, *in_c, *not_ascii, *on_server])

    [(encoding,)] = encoded.database.rows("show server_encoding")
    #  in LATIN1 the bytes of é are not UTF-8, and those of Ã© are that of é: neither constant is believed
    assert in_arrow == [*always, *in_c, *([] if encoding == "LATIN1" else not_ascii)]


def test_text_under_a_default_collation_has_postgresqls_answers(
    publisher_cluster: Cluster, spark: SparkSession
) -> None:
    """A database whose locale is not C."""
    database = create_database(publisher_cluster, "default")
    name = f"{database.name}_icu"
    with connect(publisher_cluster.dsn(), purpose="test") as admin:
        try:
            admin.execute(
                sql.SQL(
                    "create database {} template template0"
                    " locale_provider icu icu_locale 'de' locale 'C.UTF-8'"
                ).format(sql.Identifier(name))
            )
        except psycopg.errors.FeatureNotSupported as error:
            pytest.skip(f"this server: {error.diag.message_primary}")
        finally:
            drop_database(database)
    database = Database(publisher_cluster, name)
    try:
        texts = ["s = 'a'", "s < 'b'", "s > 'Ä'", "c < 'b'", "s like 'a%'", "upper(s) = 'SS'"]
        assert check(fill(database, WORDS), spark, texts) == ["s = 'a'", "s like 'a%'"]
    finally:
        drop_database(database)
