//! Implements GetContainerEvents: streams the lifecycle's events in CRI's form.

use super::Cri;
use super::convert::report;
use super::status::status;
use crate::lifecycle::events::Subscription;
use nacelle_proto::cri;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio_stream::Stream;
use tonic::Status;

/// The event stream of one subscriber. Each event is converted when it is sent, so only the lifecycle queues events.
pub struct Events(Subscription);

impl Stream for Events {
    type Item = Result<cri::ContainerEventResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = Pin::new(&mut self.0).poll_next(context);
        event.map(|event| event.map(|event| event.map(|event| report::event(&event)).map_err(status)))
    }
}

impl Cri {
    pub(super) fn on_get_container_events(&self) -> Events {
        Events(self.node.services().events.subscribe())
    }
}
