"""What tests that load models share."""

from load_fixtures import collector_as_it_was as collector_as_it_was
from load_fixtures import model as model
from load_fixtures import others as others
