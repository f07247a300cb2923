"""A plan for Kubernetes: Kustomize patches that pin the Pods of engines to nodes."""

import json
import re
from typing import Final

from tensor_dedup.errors import ConfigError
from tensor_dedup.planning.placement.plan import FleetPlan

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-label-names, less
# what the number of a replica takes.
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,57}[a-z0-9])?")

_PATCH: Final = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions:
              - {{key: kubernetes.io/hostname, operator: In, values: [{node}]}}
"""


def patches(found: FleetPlan) -> str:
    """Return the plan `found` as YAML documents, with one patch for each replica.

    The Pods of a model are called MODEL-1, MODEL-2 and so on, in the order of the plan's nodes. The
    plan's node names must be the host names of the cluster's nodes.

    Raises:
        ConfigError: A model's name is not valid in the name of a Pod.
    """
    documents = []
    for model, nodes in sorted(found.placement().items()):
        if _NAME.fullmatch(model) is None:
            what = (
                f"{model!r} cannot be the name of a Pod: use lower-case letters, digits and "
                "hyphens, 59 at most, in the file of models"
            )
            raise ConfigError(what, model=model)
        for number, node in enumerate(nodes, 1):
            documents.append(_PATCH.format(name=f"{model}-{number}", node=json.dumps(node)))
    return "---\n".join(documents)
