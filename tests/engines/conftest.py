"""What tests that load models share."""

from gpu_runs.gpu_engines import driver as driver
from gpu_runs.gpu_engines import sleepers as sleepers
from vllm_runs.load_fixtures import collector_as_it_was as collector_as_it_was
from vllm_runs.load_fixtures import model as model
from vllm_runs.load_fixtures import others as others
