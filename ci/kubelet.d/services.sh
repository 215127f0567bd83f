# etcd and the API server as services of a whole node (sourced after node.sh). Clients with KUBECONFIG are in the group system:masters.
export KUBECONFIG=/etc/kubernetes/kubeconfig
node_ready() { [ "$(kubectl get node node -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')" = True ]; }
# unit NAME COMMAND...: writes a service that always runs.
unit() {
    local name=$1
    shift
    printf '[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=%s\nRestart=always\nRestartSec=5\n[Install]\nWantedBy=multi-user.target\n' \
        "$*" >"/etc/systemd/system/$name.service"
}

# etcd_and_apiserver MODE [ETCD-OPTION...]: writes the units `etcd` and `apiserver` and what they read, and installs the programs that
# ETCD, APISERVER, KUBELET, KUBECTL and CRICTL name. MODE is the API server's authorization mode.
etcd_and_apiserver() {
    local mode=$1
    shift
    mkdir -p /var/lib/etcd /etc/kubernetes/pki
    install -m 755 "$ETCD" $bin/etcd
    install -m 755 "$APISERVER" $bin/kube-apiserver
    install -m 755 "$KUBELET" $bin/kubelet
    install -m 755 "$KUBECTL" $bin/kubectl
    install -m 755 "$CRICTL" $bin/crictl
    openssl genrsa -out /etc/kubernetes/pki/tokens.key 2048 2>/dev/null
    echo 'only-this-test-has-access,all,all,system:masters' >/etc/kubernetes/users.csv
    cat >$KUBECONFIG <<'END'
{"apiVersion": "v1", "kind": "Config", "current-context": "here",
 "clusters": [{"name": "here", "cluster": {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": true}}],
 "users": [{"name": "all", "user": {"token": "only-this-test-has-access"}}],
 "contexts": [{"name": "here", "context": {"cluster": "here", "user": "all"}}]}
END
    unit etcd $bin/etcd --data-dir /var/lib/etcd "$@"
    # Its certificate, which it makes, names 192.0.2.10 and the address of its service.
    unit apiserver $bin/kube-apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=6443 --allow-privileged=true \
        --advertise-address=192.0.2.10 --cert-dir=/var/lib/kubernetes --token-auth-file=/etc/kubernetes/users.csv \
        --authorization-mode="$mode" --service-cluster-ip-range=10.96.0.0/16 \
        --service-account-issuer=https://cluster.example --service-account-key-file=/etc/kubernetes/pki/tokens.key \
        --service-account-signing-key-file=/etc/kubernetes/pki/tokens.key
}

# kubelet_of ENDPOINT: writes the unit `kubelet` and its configuration, with a runtime's socket.
kubelet_of() {
    mkdir -p /etc/kubernetes/manifests
    cat >/etc/kubernetes/kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: $1
staticPodPath: /etc/kubernetes/manifests
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
failSwapOn: false
fileCheckFrequency: 1s
evictionHard: {memory.available: 1Mi, nodefs.available: 1%, imagefs.available: 1%}
END
    unit kubelet $bin/kubelet --config=/etc/kubernetes/kubelet.yaml --kubeconfig=$KUBECONFIG --hostname-override=node \
        --node-ip=192.0.2.10 --v=2
}
