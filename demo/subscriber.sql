-- A subscriber has tables of the same names; how they are laid out is its own affair.

create table airlines (carrier text primary key, name text not null);
create table airports (
    faa text primary key, name text not null, lat float8, lon float8, alt int, tz int, dst text, tzone text
);
create table planes (
    tailnum text primary key, manufacturer text, model text, seats int, landings int not null
);
create table flights (
    carrier text, flight int, flight_date date, scheduled time, origin text, dest text, tailnum text, status text,
    departed time, arrived time, dep_delay int, arr_delay int, distance int, plan text,
    received timestamptz not null default now(),
    primary key (flight_date, origin, carrier, flight, scheduled)
);
create table weather (
    origin text, time_hour timestamptz, temp numeric, dewp numeric, humid numeric, wind_dir int,
    wind_speed numeric, wind_gust numeric, precip numeric, pressure numeric, visib numeric,
    primary key (origin, time_hour)
) partition by range (time_hour);
do $$
begin
    for month in 1..12 loop
        execute format('create table weather_%s partition of weather for values from (%L) to (%L)',
            lpad(month::text, 2, '0'), make_timestamptz(2013, month, 1, 0, 0, 0, 'UTC'),
            make_timestamptz(2013, month, 1, 0, 0, 0, 'UTC') + interval '1 month');
    end loop;
end $$;
