"""What every other room uses: data types, collectives over ranks, seeds, time, files."""
