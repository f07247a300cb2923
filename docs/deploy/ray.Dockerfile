# The engines' image with Ray in it, for the nodes of a fleet (ray/fleet.yaml, kubernetes/ray-service.yaml).
# Build it from the root of a clone, after engine.Dockerfile:
#   docker build -f docs/deploy/ray.Dockerfile -t tensor-dedup-ray:0.1.0 .

ARG ENGINE=tensor-dedup-engine:0.1.0
FROM ${ENGINE}

USER root
RUN python3 -m pip install --no-cache-dir "ray[serve]==2.60.0" "obstore>=0.12,<0.13"

ARG UID=1000
USER ${UID}:${UID}
# Ray is started by who runs the container.
ENTRYPOINT []
CMD ["ray", "--help"]
