//! Tests the responses to Exec, Attach and PortForward over CRI, on simulated pod processes. The streams behind their URLs are
//! tested in `nacelle-stream`, and with crictl in ci/e2e.

mod common;

use common::World;
use nacelle_proto::cri;
use tonic::Code;

fn exec(id: &str) -> cri::ExecRequest {
    cri::ExecRequest { container_id: id.into(), cmd: vec!["x".into()], stdout: true, ..Default::default() }
}

#[test]
fn urls_are_given_for_what_runs_and_is_asked_for_rightly() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("web").await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        let not_running = daemon.cri.exec(exec(&id)).await.unwrap_err();
        assert_eq!(not_running.code(), Code::FailedPrecondition);
        daemon.start(&id).await.unwrap();
        let first = daemon.cri.exec(exec(&id[..12])).await.unwrap().into_inner().url;
        let second = daemon.cri.exec(exec(&id)).await.unwrap().into_inner().url;
        assert!(first.starts_with("http://127.0.0.1:") && first.contains("/exec/"), "{first}");
        assert_ne!(first, second);

        assert_eq!(daemon.cri.exec(exec("0123")).await.unwrap_err().code(), Code::NotFound);
        for wrong in [
            cri::ExecRequest { container_id: String::new(), ..exec(&id) },
            cri::ExecRequest { cmd: vec![], ..exec(&id) },
            cri::ExecRequest { stdout: false, ..exec(&id) },
            cri::ExecRequest { tty: true, stderr: true, ..exec(&id) },
        ] {
            assert_eq!(daemon.cri.exec(wrong.clone()).await.unwrap_err().code(), Code::InvalidArgument, "{wrong:?}");
        }

        let attach = |id: &str| cri::AttachRequest { container_id: id.into(), stdout: true, ..Default::default() };
        let url = daemon.cri.attach(attach(&id)).await.unwrap().into_inner().url;
        assert!(url.contains("/attach/"), "{url}");
        assert_eq!(daemon.cri.attach(attach("0123")).await.unwrap_err().code(), Code::NotFound);
        for wrong in [
            cri::AttachRequest { container_id: String::new(), ..attach(&id) },
            cri::AttachRequest { stdout: false, ..attach(&id) },
            // The container has no terminal.
            cri::AttachRequest { tty: true, ..attach(&id) },
        ] {
            assert_eq!(daemon.cri.attach(wrong.clone()).await.unwrap_err().code(), Code::InvalidArgument, "{wrong:?}");
        }

        let forward = |pod: &str, port| cri::PortForwardRequest { pod_sandbox_id: pod.into(), port: vec![port] };
        let url = daemon.cri.port_forward(forward(&pod, 80)).await.unwrap().into_inner().url;
        assert!(url.contains("/portforward/"), "{url}");
        assert_eq!(daemon.cri.port_forward(forward("0123", 80)).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.cri.port_forward(forward(&pod, 0)).await.unwrap_err().code(), Code::InvalidArgument);
        daemon.stop_pod(&pod).await.unwrap();
        assert_eq!(daemon.cri.port_forward(forward(&pod, 80)).await.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(daemon.cri.attach(attach(&id)).await.unwrap_err().code(), Code::FailedPrecondition);
    });
}
