//! Counts the requests to the networks of pods. The plugins of a network answer a request together, so one request counts once
//! however many plugins there are, and however often DEL was repeated for it.

use crate::lifecycle::services::Networks;
use crate::metrics::counters::EventCounters;
use crate::metrics::labels::{CniCommandLabel, RequestResult};
use nacelle_base::PodId;
use nacelle_net::{Attachment, CniError, KnownPods, NetError, PodRef};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Networks whose requests are counted.
pub(crate) struct CountedNetworks {
    networks: Arc<dyn Networks>,
    counters: EventCounters,
}

impl CountedNetworks {
    /// Counts the requests to these networks.
    pub(crate) fn new(networks: Arc<dyn Networks>, counters: EventCounters) -> CountedNetworks {
        CountedNetworks { networks, counters }
    }

    /// Awaits a request and counts it. One that is dropped has failed.
    async fn count<T>(
        &self,
        command: CniCommandLabel,
        request: impl Future<Output = Result<T, NetError>>,
        is_success: impl Fn(&T) -> bool,
    ) -> Result<T, NetError> {
        let counters = self.counters.clone();
        let mut counted = CountedCommand { counters, command, began: Instant::now(), result: RequestResult::Failure };
        let result = request.await;
        counted.result = RequestResult::of(result.as_ref().is_ok_and(is_success));
        result
    }
}

struct CountedCommand {
    counters: EventCounters,
    command: CniCommandLabel,
    began: Instant,
    result: RequestResult,
}

impl Drop for CountedCommand {
    fn drop(&mut self) {
        self.counters.count_cni(self.command, self.result, self.began.elapsed());
    }
}

#[tonic::async_trait]
impl Networks for CountedNetworks {
    async fn create_netns(&self, id: &PodId) -> Result<PathBuf, NetError> {
        self.networks.create_netns(id).await
    }

    async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        self.count(CniCommandLabel::Add, self.networks.setup(pod), |_| true).await
    }

    async fn connect_taps(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError> {
        self.networks.connect_taps(id, pairs).await
    }

    async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError> {
        self.count(CniCommandLabel::Del, self.networks.release(id, limit), Option::is_none).await
    }

    async fn retry_owed_deletes(&self, limit: Duration) {
        self.networks.retry_owed_deletes(limit).await;
    }

    fn count_owed_deletes(&self) -> usize {
        self.networks.count_owed_deletes()
    }

    async fn status(&self) -> Result<(), NetError> {
        self.count(CniCommandLabel::Status, self.networks.status(), |()| true).await
    }

    async fn gc(&self, known: &KnownPods<'_>, limit: Duration) -> Result<(), NetError> {
        self.count(CniCommandLabel::Gc, self.networks.gc(known, limit), |()| true).await
    }
}
