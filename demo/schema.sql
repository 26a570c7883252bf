-- The shop window of the demo: departures from New York.
--
-- flights is partitioned by month and then by airport. Its leaves are made with another column order than the
-- root's and attached, as happens in databases that have grown; their replica identity is the full row, so that
-- row filters may read any column. Flight plans of long flights are large and stored out of line.

create table airlines (carrier text primary key, name text not null);
create table airports (
    faa text primary key, name text not null, lat float8, lon float8, alt int, tz int, dst text, tzone text
);
create table planes (
    tailnum text primary key, year int, type text, manufacturer text, model text, engines int, seats int,
    speed int, engine text, landings int not null default 0
);

create table weather (
    origin text, time_hour timestamptz, temp numeric, dewp numeric, humid numeric, wind_dir int,
    wind_speed numeric, wind_gust numeric, precip numeric, pressure numeric, visib numeric,
    primary key (origin, time_hour)
) partition by range (time_hour);

create table flights (
    flight_date date, origin text, carrier text, flight int, scheduled time, dest text not null, tailnum text,
    status text not null, departed time, dep_delay int, arrived time, arr_delay int, distance int, plan text,
    primary key (flight_date, origin, carrier, flight, scheduled)
) partition by range (flight_date);

create function add_month(first date) returns void language plpgsql as $$
declare
    month text := to_char(first, 'MM');
    last date := first + interval '1 month';
    airport text;
begin
    execute format('create table weather_%s partition of weather for values from (%L) to (%L)',
        month, first::timestamp at time zone 'UTC', last::timestamp at time zone 'UTC');
    execute format('create table flights_%s partition of flights for values from (%L) to (%L)'
        ' partition by list (origin)', month, first, last);
    foreach airport in array array['EWR', 'JFK', 'LGA'] loop
        execute format('create table flights_%s_%s (
            plan text, status text not null, dest text not null, distance int, tailnum text, scheduled time,
            flight int, carrier text, origin text, flight_date date, arr_delay int, arrived time, dep_delay int,
            departed time, primary key (flight_date, origin, carrier, flight, scheduled))', month, lower(airport));
        execute format('alter table flights_%s_%s alter plan set storage external', month, lower(airport));
        execute format('alter table flights_%s_%s replica identity full', month, lower(airport));
        execute format('alter table flights_%s attach partition flights_%s_%s for values in (%L)',
            month, month, lower(airport), airport);
    end loop;
end $$;
select add_month(('2013-' || lpad(month::text, 2, '0') || '-01')::date) from generate_series(1, 12) as month;
drop function add_month;
