//! Tests pods of kubelet that continue from the checkpoint of another one.

use super::CaseResult;
use super::cluster::cluster;
use crate::cluster::TestCluster;
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, example, wait_for};

/// The token of the service account, which kubelet makes for each pod.
const TOKEN: &str = "cat /var/run/secrets/kubernetes.io/serviceaccount/token";

/// Returns the lines of a pod's log: a number and a host name.
fn lines(cluster: &TestCluster, pod: &str) -> Vec<(u64, String)> {
    let log = cluster.kubectl(&["logs", pod]).stdout;
    let line = |line: &str| {
        let (number, hostname) = line.split_once(' ')?;
        Some((number.parse().ok()?, hostname.to_owned()))
    };
    log.lines().filter_map(line).collect()
}

pub fn replica_set_from_a_checkpoint(fixture: &KubeletFixture) -> CaseResult {
    if nacelle_e2e::node::engine() != "kvm" {
        return CaseResult::Skipped("only engine kvm restores pods");
    }
    let cluster = cluster(fixture);
    let example = example("from-checkpoint");
    let [pod, set] = &example.split("\n---\n").collect::<Vec<_>>()[..] else { panic!("a pod and a set") };
    let saved = cluster.create_pod("counter", pod);
    saved.wait_until_ready();
    wait_for("it counts", || (lines(cluster, "counter").len() > 5).then_some(()));
    let id = fixture.node.crictl.call(["pods", "-q", "--name", "counter"]);
    let created = fixture.node.nacelle_json(&["checkpoint", "create", id.trim(), "warm"]);
    assert_eq!(created["containers"][0], "counter", "{created}");
    let last = lines(cluster, "counter").last().expect("it has counted").0;

    cluster.apply(set);
    let members = cluster.wait_for_members("counters", 2);
    let mut tokens = vec![saved.shell(TOKEN)];
    for name in &members {
        let exec = |script: &str| cluster.kubectl(&["exec", name, "--", "sh", "-c", script]).ok();
        // It counts on from the moment of the checkpoint, under its own name.
        let seen = wait_for("it counts on", || Some(lines(cluster, name)).filter(|seen| seen.len() > 3));
        assert!((6..=last + 1).contains(&seen[0].0), "{last}: {seen:?}");
        assert!(seen.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0), "{seen:?}");
        assert_eq!(seen.last().expect("it counts").1, *name);
        // A hook of the new pod has run in it.
        wait_for("the hook has run", || (exec("cat /renewed") == *name).then_some(()));
        tokens.push(exec(TOKEN));
        let restarts =
            cluster.kubectl(&["get", "pod", name, "-o", "jsonpath={.status.containerStatuses[0].restartCount}"]);
        assert_eq!(restarts.ok(), "0");
    }
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), 3, "each pod has a token of its own");
    cluster.delete_set("counters");
    saved.delete();
    fixture.node.nacelle(&["checkpoint", "rm", "warm"]).ok();
    CaseResult::Passed
}
