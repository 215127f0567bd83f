//! Owns: the agent in a real machine: what a pod process sees of it.

mod machine;

use machine::Guest;
use nacelle_proto::agent::{
    AttachImageRequest, ContainerRef, DetachImageRequest, Empty, ExecRequest, ResizeRequest, SignalRequest, Stream,
    WaitRequest,
};
use serde_json::json;
use std::io::Write;
use tonic::Code;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

#[test]
fn containers_run() {
    runtime().block_on(async {
        let Some(mut guest) = Guest::boot(|_| ()).await else { return };
        assert_eq!(guest.hello.protocol, 1);

        let (output, exit) = guest.run("c1", "echo out; echo err >&2; hostname; cat /etc/hostname; exit 7", |_, _| ()).await;
        assert_eq!(output, "out\npod\npod\n");
        assert_eq!(guest.output("c1", "", Stream::Stderr).await, "err\n");
        assert_eq!((exit.code, exit.oom_killed), (7, false));
        assert!(exit.finished_at_unix_nanos > 1_900_000_000_000_000_000);
        guest.start("c1").await;
        let states = guest.agent.list_containers(Empty {}).await.unwrap().into_inner().containers;
        assert_eq!(states.len(), 1);
        assert!(states[0].started && states[0].exit == Some(exit));

        let (output, exit) = guest.run("c2", "kill -TERM $$", |_, request| request.stdin = true).await;
        assert_eq!((output.as_str(), exit.code), ("", 0), "PID 1 of a namespace ignores what it does not handle");

        guest.create("c3", "read line; echo got $line; trap 'exit 3' USR1; echo ready; while true; do sleep 1; done", |_, request| request.stdin = true).await;
        guest.start("c3").await;
        guest.input("c3", "", "hello\n");
        let mut stdout = guest.stream("c3", "", Stream::Stdout);
        assert_eq!(guest.read_until(&mut stdout, "ready\n"), "got hello\nready\n");
        let signal = |signal, all| SignalRequest { id: "c3".into(), exec_id: String::new(), signal, all };
        guest.agent.signal(signal(10, false)).await.unwrap();
        assert_eq!(guest.end("c3", "").await.code, 3);
        guest.agent.signal(signal(9, false)).await.unwrap();
        guest.agent.signal(signal(9, true)).await.unwrap();

        for id in ["c1", "c2", "c3", "c3"] {
            guest.agent.remove_container(ContainerRef { id: id.into() }).await.unwrap();
        }
        let gone = guest.agent.wait(WaitRequest { id: "c1".into(), exec_id: String::new(), timeout_ms: 0 }).await;
        assert_eq!(gone.unwrap_err().code(), Code::NotFound);
        guest.agent.detach_image(DetachImageRequest { partition: 1 }).await.unwrap();
        guest.agent.detach_image(DetachImageRequest { partition: 1 }).await.unwrap();
        guest.agent.shutdown(Empty {}).await.unwrap();
        let exit = guest.machine.wait(machine::LIMIT).expect("an end");
        assert_eq!(exit.how, nacelle_engine::ExitKind::Shutdown, "{exit:?}");
    });
}
