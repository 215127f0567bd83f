//! Checks that calls which the client cancels before the server has handled them do not end the connection that they share with
//! others.

use hyper_util::rt::TokioIo;
use nacelle_proto::node::node_client::NodeClient;
use nacelle_proto::node::node_server::{Node, NodeServer};
use nacelle_proto::node::{
    BuildTemplatesRequest, BuildTemplatesResponse, DropTemplatesRequest, DropTemplatesResponse, GuestShellEvent,
    GuestShellRequest, ListInstallationsRequest, ListInstallationsResponse, ListTemplatesRequest,
    ListTemplatesResponse, LoadImagesRequest, LoadImagesResponse, SetLogFilterRequest, SetLogFilterResponse,
    VerifyImagesRequest, VerifyImagesResponse,
};
use std::io;
use tokio::io::DuplexStream;
use tonic::transport::{Endpoint, Uri};
use tonic::{Request, Response, Status, Streaming};

struct Answers;

#[tonic::async_trait]
impl Node for Answers {
    async fn load_images(&self, _: Request<LoadImagesRequest>) -> Result<Response<LoadImagesResponse>, Status> {
        Ok(Response::new(LoadImagesResponse::default()))
    }

    async fn list_installations(
        &self,
        _: Request<ListInstallationsRequest>,
    ) -> Result<Response<ListInstallationsResponse>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }

    async fn list_templates(
        &self,
        _: Request<ListTemplatesRequest>,
    ) -> Result<Response<ListTemplatesResponse>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }

    async fn build_templates(
        &self,
        _: Request<BuildTemplatesRequest>,
    ) -> Result<Response<BuildTemplatesResponse>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }

    async fn drop_templates(
        &self,
        _: Request<DropTemplatesRequest>,
    ) -> Result<Response<DropTemplatesResponse>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }

    async fn set_log_filter(&self, _: Request<SetLogFilterRequest>) -> Result<Response<SetLogFilterResponse>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }

    type OpenGuestShellStream = tokio_stream::Empty<Result<GuestShellEvent, Status>>;

    async fn open_guest_shell(
        &self,
        _: Request<Streaming<GuestShellRequest>>,
    ) -> Result<Response<Self::OpenGuestShellStream>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }

    async fn verify_images(&self, _: Request<VerifyImagesRequest>) -> Result<Response<VerifyImagesResponse>, Status> {
        Err(Status::unimplemented("this test does not call it"))
    }
}

#[tokio::test]
async fn cancelled_calls_do_not_end_the_connection() {
    let (near, far) = tokio::io::duplex(1 << 20);
    let mut near = Some(near);
    // There is only one connection: after its end a call fails.
    let connector = tower::service_fn(move |_: Uri| {
        let near = near.take();
        async move { near.map(TokioIo::new).ok_or_else(|| io::Error::other("the connection has ended")) }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await.expect("a connection");
    let client = NodeClient::new(channel);
    let call = || {
        let mut client = client.clone();
        async move { client.load_images(LoadImagesRequest::default()).await }
    };
    // The server is blocked while the calls are sent and cancelled. An HTTP/2 client starts with at most 100 concurrent calls.
    let calls: Vec<_> = (0..90).map(|_| tokio::spawn(call())).collect();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    let server = nacelle_proto::server::builder().add_service(NodeServer::new(Answers));
    let incoming = tokio_stream::once(Ok::<DuplexStream, io::Error>(far));
    // The listener never yields a second connection; the server continues with the first.
    tokio::spawn(async move { server.serve_with_incoming(incoming).await });
    for call in calls {
        assert!(call.await.expect_err("it was cancelled").is_cancelled());
    }
    call().await.expect("the connection works");
}
