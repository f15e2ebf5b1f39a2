# The processes of scripts/try-kube-apiserver, which sources this file: Orlop, Postgres and the control plane, with their
# certificates, ports and logs. Uses $work (the folder of a run), $part (the folder of a part below it) and $orlop.

# Empties the folder of the run, makes a CA with one certificate for all servers and clients, and stops everything at the end.
prepare() {
  if [[ -n $(ls -A "$work" 2>/dev/null) && ! -f $work/tokens.csv ]]; then
    echo "try-kube-apiserver: $work contains files that are not of an earlier run" >&2
    exit 2
  fi
  rm -rf "$work"
  mkdir -p "$work"
  # Postgres's user must reach its data below.
  chmod 755 "$work"
  trap stop_all EXIT
  trap 'exit 1' INT TERM
  (
    cd "$work"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 30 -subj /CN=ca -keyout ca.key -out ca.crt
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj /CN=peer -keyout peer.key -out peer.csr
    openssl x509 -req -in peer.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out peer.crt \
      -extfile <(printf 'basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n')
    openssl genrsa -out accounts.key 2048
  ) 2>"$work/openssl.log"
  token_of_admin=$(openssl rand -hex 16)
  as_admin=(--cacert "$work/ca.crt" -H "Authorization: Bearer $token_of_admin")
  echo "$token_of_admin,admin,admin,system:masters" >"$work/tokens.csv"
}

# Not from the range of outgoing connections, one of which could take the port of a server that is restarted.
free_port() {
  python3 -c '
import random, socket
while True:
    port = random.randrange(20000, 32000)
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            continue
    print(port)
    break'
}

# The port of a named server, the same at each start.
port_of() {
  local file=$work/$part/$1.port
  mkdir -p "$work/$part"
  [[ -f $file ]] || free_port >"$file"
  cat "$file"
}

# eventually SECONDS COMMAND...: repeats the command until it succeeds. Shows its last output if it does not.
eventually() {
  local end=$((SECONDS + $1)) output
  shift
  until output=$("$@" 2>&1); do
    if ((SECONDS >= end)); then
      echo "$* did not succeed: $output"
      return 1
    fi
    sleep 0.2
  done
}

# start NAME COMMAND...: runs a server, with its log in the folder of the part.
start() {
  local name=$1
  shift
  "$@" >>"$work/$part/$name.log" 2>&1 &
  disown
  echo $! >"$work/$part/$name.pid"
}

# stop NAME [SIGNAL]: each check runs in a shell of its own, so the process need not be a child of this one.
stop() {
  local file=$work/$part/$1.pid pid
  pid=$(cat "$file")
  kill "-${2:-TERM}" "$pid" 2>/dev/null || true
  while holds_its_files "$pid"; do sleep 0.05; done
  rm "$file"
}

# A process that nobody waits for stays as a zombie. The threads of a killed one may end later, and its port with them.
holds_its_files() {
  [[ -d /proc/$1 && ($(awk '{print $3}' "/proc/$1/stat" 2>/dev/null) != Z || $(ls "/proc/$1/task" 2>/dev/null | wc -l) -gt 1) ]]
}

all_run() {
  local name
  for name in "$@"; do
    kill -0 "$(cat "$work/$part/$name.pid")" || return 1
  done
}

stop_all() {
  local file
  # In the order in which they depend on each other, so that none logs errors about the end of another.
  for file in watch kube-scheduler kube-controller-manager kube-apiserver-extensions kube-apiserver; do
    [[ ! -f $work/$part/$file.pid ]] || stop "$file"
  done
  for file in "$work/$part"/*.pid; do
    [[ ! -f $file ]] || stop "$(basename "$file" .pid)"
  done
  for file in primary standby; do
    [[ ! -f $work/$part/$file/postmaster.pid ]] || postgres "$file" pg_ctl stop -m immediate >/dev/null
  done
}

# start_api_server ENDPOINTS [FLAG]...: kube-apiserver alone, ready to be used.
start_api_server() {
  local endpoints=$1
  shift
  server=https://127.0.0.1:$(port_of api-server)
  collection=/api/v1/namespaces/default/configmaps
  kubeconfig=$work/$part/kubeconfig
  etcdctl=(--endpoints "$endpoints" --cacert "$work/ca.crt" --cert "$work/peer.crt" --key "$work/peer.key")
  cat >"$kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{ name: try, cluster: { server: "$server", certificate-authority: "$work/ca.crt" } }]
users: [{ name: admin, user: { token: $token_of_admin } }]
contexts: [{ name: try, context: { cluster: try, user: admin } }]
current-context: try
END
  local tls=()
  [[ $endpoints == http:* ]] || tls=(--etcd-cafile "$work/ca.crt" --etcd-certfile "$work/peer.crt" --etcd-keyfile "$work/peer.key")
  # The advertised address is only stored in an object.
  start kube-apiserver kube-apiserver --etcd-servers="$endpoints" "${tls[@]}" "$@" --etcd-compaction-interval=10s \
    --bind-address=127.0.0.1 --secure-port="$(port_of api-server)" --advertise-address=192.0.2.1 \
    --tls-cert-file="$work/peer.crt" --tls-private-key-file="$work/peer.key" --cert-dir="$work/$part/certificates" \
    --token-auth-file="$work/tokens.csv" --authorization-mode=RBAC --service-cluster-ip-range=10.0.0.0/24 \
    --service-account-issuer=https://kubernetes.default.svc --service-account-signing-key-file="$work/accounts.key" \
    --service-account-key-file="$work/accounts.key"
  eventually 120 k get --raw /readyz
}

# The API server for custom resources, in front of which the started API server stays for authentication.
start_extensions_server() {
  local core=$kubeconfig address
  address=https://127.0.0.1:$(port_of extensions)
  kubeconfig=$work/$part/extensions.kubeconfig
  sed "s#$server#$address#" "$core" >"$kubeconfig"
  server=$address
  # The older API server does not have the objects of the disabled features.
  start kube-apiserver-extensions apiextensions-apiserver --etcd-servers="$store" --etcd-compaction-interval=10s \
    --bind-address=127.0.0.1 --secure-port="$(port_of extensions)" --tls-cert-file="$work/peer.crt" \
    --tls-private-key-file="$work/peer.key" --kubeconfig="$core" --authentication-kubeconfig="$core" \
    --authentication-skip-lookup --authorization-kubeconfig="$core" --enable-priority-and-fairness=false \
    --disable-admission-plugins=MutatingAdmissionPolicy,ValidatingAdmissionPolicy
  eventually 60 k get --raw /readyz
}

# The whole control plane. Without a kubelet, the one node stays ready because its grace period does not end.
start_control_plane() {
  start_api_server "$@"
  start kube-controller-manager kube-controller-manager --kubeconfig="$kubeconfig" --port=0 --secure-port=0 \
    --service-account-private-key-file="$work/accounts.key" --root-ca-file="$work/ca.crt" --node-monitor-grace-period=1h
  start kube-scheduler kube-scheduler --kubeconfig="$kubeconfig" --port=0 --secure-port=0
}

k() {
  kubectl --kubeconfig "$kubeconfig" --cache-dir "$work/$part/kubectl" "$@"
}

store_keys() {
  etcdctl "${etcdctl[@]}" get / --prefix --keys-only | grep -v '^$'
}

apply_node() {
  k create -f - <<END
apiVersion: v1
kind: Node
metadata: { name: node-1 }
status:
  capacity: { cpu: "8", memory: 16Gi, pods: "110" }
  allocatable: { cpu: "8", memory: 16Gi, pods: "110" }
  conditions: [{ type: Ready, status: "True", reason: Try, message: try, lastHeartbeatTime: "$(date -u +%FT%TZ)", lastTransitionTime: "$(date -u +%FT%TZ)" }]
END
}

# postgres SERVER PROGRAM ARGUMENT...: runs a program of Postgres on the data of the primary or the standby, as a user that it accepts.
postgres() {
  local data=$work/$part/$1 program=$2 programs user=()
  shift 2
  programs=$(dirname "$(realpath "$(command -v initdb || ls -v /usr/lib/postgresql/*/bin/initdb | tail -1)")")
  [[ $EUID != 0 ]] || user=(setpriv --reuid=postgres --regid=postgres --clear-groups)
  (cd / && PGDATA=$data "${user[@]}" "$programs/$program" "$@")
}

# By default a standby tries again only every 5 seconds to reach its primary, which has to wait for it.
run_postgres() {
  local name=$1
  shift
  postgres "$name" pg_ctl start -w -s -l "$work/$part/$name/log" \
    -o "-p $(port_of "$name") -c listen_addresses=127.0.0.1 -c unix_socket_directories='' \
      -c wal_retrieve_retry_interval=100ms $*"
}

# Only the primary waits for a standby: after the failover there is none.
run_primary() {
  run_postgres primary -c "synchronous_standby_names=*"
}

# start_sqlite SCHEME: one Orlop; with https it accepts only clients with a certificate.
start_sqlite() {
  store=$1://127.0.0.1:$(port_of orlop)
  run_sqlite
}

run_sqlite() {
  local tls=()
  [[ $store == http:* ]] || tls=(--cert-file "$work/peer.crt" --key-file "$work/peer.key" --trusted-ca-file "$work/ca.crt" --client-cert-auth)
  start orlop "$orlop" --data-dir "$work/$part/data" --listen-client-urls "$store" --advertise-client-urls "$store" "${tls[@]}"
}

restart_sqlite() {
  stop orlop "$1"
  run_sqlite
}

start_etcd() {
  store=http://127.0.0.1:$(port_of etcd)
  start etcd etcd --data-dir "$work/$part/data" --listen-client-urls "$store" --advertise-client-urls "$store" \
    --listen-peer-urls "http://127.0.0.1:$(port_of peers)"
}

# A Postgres with a synchronous standby.
start_postgres() {
  start_primary
  install_data standby
  postgres standby pg_basebackup --checkpoint=fast --no-sync --write-recovery-conf -D "$work/$part/standby" \
    -d "host=127.0.0.1 port=$(port_of primary) user=postgres application_name=standby"
  run_postgres standby
  postgres primary pg_ctl stop -s -m fast
  run_primary
}

start_primary() {
  install_data primary
  postgres primary initdb --no-sync --auth=trust --username=postgres --encoding=UTF8 --locale=C >/dev/null
  run_postgres primary
  postgres primary psql -q -h 127.0.0.1 -p "$(port_of primary)" -U postgres -c "CREATE ROLE orlop LOGIN" \
    -c "CREATE DATABASE orlop OWNER orlop"
}

install_data() {
  install -d -m 700 "$work/$part/$1"
  [[ $EUID != 0 ]] || chown postgres: "$work/$part/$1"
}

# Three instances, which know both servers of Postgres.
start_instances() {
  local i
  store=
  for i in 1 2 3; do
    run_instance $i
    store+=${store:+,}http://127.0.0.1:$(port_of "instance-$i")
  done
}

run_instance() {
  local address
  address=http://127.0.0.1:$(port_of "instance-$1")
  start "orlop-$1" "$orlop" --name "orlop-$1" --listen-client-urls "$address" --advertise-client-urls "$address" \
    --datastore-endpoint "postgres://orlop@127.0.0.1:$(port_of primary),127.0.0.1:$(port_of standby)/orlop"
}

run_events() {
  local address
  address=http://127.0.0.1:$(port_of events)
  start orlop-events "$orlop" --data-dir "$work/$part/events" --listen-client-urls "$address" --advertise-client-urls "$address"
}

restart_instance() {
  stop "orlop-$1" KILL
  run_instance "$1"
}

restart_leader() {
  local i leader
  leader=$(etcdctl "${etcdctl[@]}" endpoint status | awk -F', ' '$5 == "true" {print $1}')
  for i in 1 2 3; do
    if [[ $leader == *:$(port_of "instance-$i") ]]; then
      restart_instance $i
      return
    fi
  done
  echo "no leader: $leader"
  return 1
}

restart_postgres() {
  postgres primary pg_ctl stop -s -m immediate
  run_primary
}

fail_over() {
  postgres primary pg_ctl stop -s -m immediate
  postgres standby pg_ctl promote -w -s
}
