"""What schedulers, sensors and pages ask of servers and logs; nothing here changes anything."""
