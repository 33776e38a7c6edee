"""What a run is: model, layout, batch, training. No torch."""
