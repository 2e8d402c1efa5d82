#!/bin/sh
# runc for a docker daemon that may not raise limits (root without CAP_SYS_RESOURCE, as in a container): limits above the
# own hard limit are left out. dockerd --add-runtime=here=/…/runc_within_limits.sh --default-runtime=here
bundle='' previous=''
for word; do
  [ "$previous" != --bundle ] || bundle=$word
  case $word in --bundle=*) bundle=${word#--bundle=} ;; esac
  previous=$word
done
if [ -f "$bundle/config.json" ]; then
  python3 - "$bundle/config.json" <<'PY'
import json, resource, sys

def fits(limit):
    hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
    return hard == resource.RLIM_INFINITY or limit["hard"] <= hard

with open(sys.argv[1]) as file:
    config = json.load(file)
config["process"]["rlimits"] = [limit for limit in config["process"].get("rlimits") or [] if fits(limit)]
with open(sys.argv[1], "w") as file:
    json.dump(config, file)
PY
fi
exec runc "$@"
