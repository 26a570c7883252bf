-- jfk_board: what a board in the terminal shows.
create publication jfk_open for table flights
    where (origin = 'JFK' and status <> 'landed' and status <> 'cancelled')
    with (publish_via_partition_root = true);

-- operations: two publications, OR-ed. A flight that is no longer late, or is renumbered, leaves or moves.
create publication late_flights for table flights where (dep_delay > 60)
    with (publish_via_partition_root = true);
create publication one_airline for table flights where (carrier = 'B6'), airlines where (carrier = 'B6')
    with (publish_via_partition_root = true);

-- analytics: everything via the root, some columns of the planes, the weather without its partitions' end.
create publication analytics_flights for table flights, airlines, airports, planes (tailnum, manufacturer, model, seats, landings)
    with (publish_via_partition_root = true);
create publication analytics_weather for table weather
    with (publish = 'insert, truncate', publish_via_partition_root = false);
