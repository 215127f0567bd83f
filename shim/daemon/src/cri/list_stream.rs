//! Implements the Stream* RPCs: they return the same items as the lists, in messages small enough for every client.

use super::{Answer, Cri};
use nacelle_proto::cri;
use prost::Message;
use tonic::{Response, Status};

/// The largest message in bytes: gRPC clients accept 4 MiB by default, and kubelet 16 MiB.
const LIMIT: usize = 1 << 20;
/// The bytes of a field's number and length before each item.
const FRAME: usize = 1 + 10;

/// A stream of responses.
pub type ListStream<A> = tokio_stream::Iter<std::vec::IntoIter<Result<A, Status>>>;

/// Returns each item once and in order, with at least one item in each response; an item above the limit has a response of its
/// own.
fn split_list<T: Message, A>(items: Vec<T>, answer: impl Fn(Vec<T>) -> A) -> Response<ListStream<A>> {
    let (mut answers, mut piece, mut length) = (Vec::new(), Vec::new(), 0);
    for item in items {
        let more = item.encoded_len() + FRAME;
        if length + more > LIMIT && !piece.is_empty() {
            answers.push(Ok(answer(std::mem::take(&mut piece))));
            length = 0;
        }
        length += more;
        piece.push(item);
    }
    if !piece.is_empty() {
        answers.push(Ok(answer(piece)));
    }
    Response::new(tokio_stream::iter(answers))
}

impl Cri {
    pub(super) async fn on_stream_pod_sandboxes(
        &self,
        request: cri::StreamPodSandboxesRequest,
    ) -> Answer<ListStream<cri::StreamPodSandboxesResponse>> {
        let list = self.on_list_pod_sandbox(cri::ListPodSandboxRequest { filter: request.filter }).await?;
        Ok(split_list(list.items, |pod_sandboxes| cri::StreamPodSandboxesResponse { pod_sandboxes }))
    }

    pub(super) async fn on_stream_containers(
        &self,
        request: cri::StreamContainersRequest,
    ) -> Answer<ListStream<cri::StreamContainersResponse>> {
        let list = self.on_list_containers(cri::ListContainersRequest { filter: request.filter }).await?;
        Ok(split_list(list.containers, |containers| cri::StreamContainersResponse { containers }))
    }

    pub(super) async fn on_stream_container_stats(
        &self,
        request: cri::StreamContainerStatsRequest,
    ) -> Answer<ListStream<cri::StreamContainerStatsResponse>> {
        let list = self.on_list_container_stats(cri::ListContainerStatsRequest { filter: request.filter }).await?;
        Ok(split_list(list.stats, |container_stats| cri::StreamContainerStatsResponse { container_stats }))
    }

    pub(super) async fn on_stream_pod_sandbox_stats(
        &self,
        request: cri::StreamPodSandboxStatsRequest,
    ) -> Answer<ListStream<cri::StreamPodSandboxStatsResponse>> {
        let list = self.on_list_pod_sandbox_stats(cri::ListPodSandboxStatsRequest { filter: request.filter }).await?;
        Ok(split_list(list.stats, |pod_sandbox_stats| cri::StreamPodSandboxStatsResponse { pod_sandbox_stats }))
    }

    pub(super) async fn on_stream_pod_sandbox_metrics(
        &self,
        _: cri::StreamPodSandboxMetricsRequest,
    ) -> Answer<ListStream<cri::StreamPodSandboxMetricsResponse>> {
        let list = self.on_list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest {}).await?;
        Ok(split_list(list.pod_metrics, |pod_sandbox_metrics| cri::StreamPodSandboxMetricsResponse {
            pod_sandbox_metrics,
        }))
    }

    pub(super) async fn on_stream_images(
        &self,
        request: cri::StreamImagesRequest,
    ) -> Answer<ListStream<cri::StreamImagesResponse>> {
        let list = self.on_list_images(cri::ListImagesRequest { filter: request.filter }).await?;
        Ok(split_list(list.images, |images| cri::StreamImagesResponse { images }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_stream::StreamExt;

    async fn lengths(sizes: &[usize]) -> Vec<Vec<usize>> {
        let items = sizes.iter().map(|size| cri::Image { id: "x".repeat(*size), ..Default::default() }).collect();
        let mut answers = split_list(items, |images| cri::StreamImagesResponse { images }).into_inner();
        let mut lengths = Vec::new();
        while let Some(answer) = answers.next().await {
            let answer = answer.unwrap();
            assert!(answer.encoded_len() <= LIMIT || answer.images.len() == 1);
            lengths.push(answer.images.iter().map(|image| image.id.len()).collect());
        }
        lengths
    }

    #[tokio::test]
    async fn each_item_comes_once_and_no_message_is_empty_or_too_large() {
        assert!(lengths(&[]).await.is_empty());
        assert_eq!(lengths(&[1, 2]).await, [vec![1, 2]]);
        let half = LIMIT / 2;
        assert_eq!(lengths(&[half, half, 3]).await, [vec![half], vec![half, 3]]);
        assert_eq!(lengths(&[1, 2 * LIMIT, 3]).await, [vec![1], vec![2 * LIMIT], vec![3]]);
        let many = vec![1000; 3000];
        assert_eq!(lengths(&many).await.concat(), many);
    }
}
