//! Contains one harness function per parser of bytes that a client writes. ci/fuzz calls them; the tests below feed them random
//! bytes and the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic or by never ending.

use crate::authority::AuthorityFilter;
use crate::spdy::Connection;
use bytes::Bytes;
use tokio::io::{AsyncWriteExt, copy, duplex, sink, split};

/// The bytes of a client after the upgrade to SPDY. Every stream is read to its end and answered.
pub fn spdy(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (near, far) = duplex(1024);
        let mut connection = Connection::serve(far);
        let (mut input, mut output) = split(near);
        let writing = async {
            // The server closes the connection when it has seen enough.
            let _ = output.write_all(data).await;
            let _ = output.shutdown().await;
        };
        let reading = async { drop(copy(&mut input, &mut sink()).await) };
        let streams = async {
            while let Some(mut stream) = connection.streams.recv().await {
                tokio::spawn(async move {
                    while stream.reader.next().await.is_some() {}
                    if stream.writer.send(Bytes::from_static(b"x")).await.is_ok() {
                        stream.writer.finish().await;
                    }
                });
            }
        };
        tokio::join!(writing, reading, streams);
    });
}

/// The bytes of a client of the daemon's socket, in two pieces: as many bytes pass as arrive, however they are split.
pub fn authority(data: &[u8]) {
    let passed = |ends: &[usize]| {
        let (mut filter, mut out, mut from) = (AuthorityFilter::new(), Vec::new(), 0);
        for end in ends {
            filter.filter(&data[from..*end], &mut out);
            from = *end;
        }
        filter.finish(&mut out);
        out
    };
    let whole = passed(&[data.len()]);
    assert_eq!(whole.len(), data.len());
    let middle = data.first().map_or(0, |first| usize::from(*first) * data.len() / 256);
    assert_eq!(whole, passed(&[middle, data.len()]));
}

/// A harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 2] = [("spdy", spdy), ("authority", authority)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::corpus::{read_corpus, run_corpora};
    use proptest::prelude::*;

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        read_corpus(env!("CARGO_MANIFEST_DIR"), name)
    }

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    /// Frames with valid headers and arbitrary bodies.
    fn frames() -> impl Strategy<Value = Vec<u8>> {
        let body = prop::collection::vec(prop_oneof![3 => 0..10u8, 1 => any::<u8>()], 0..40);
        let frame = (any::<bool>(), 0u8..11, 0u8..4, body).prop_map(|(control, kind, flags, body)| {
            let length = u8::try_from(body.len()).unwrap_or(0);
            let start = if control { [0x80, 3, 0, kind] } else { [0, 0, 0, kind] };
            [&start[..], &[flags, 0, 0, length], &body].concat()
        });
        prop::collection::vec(frame, 0..12).prop_map(|frames| frames.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn random_clients(data in prop_oneof![prop::collection::vec(any::<u8>(), 0..300), frames()]) {
            spdy(&data);
        }

        #[test]
        fn random_callers(data in prop::collection::vec(any::<u8>(), 0..300), at in any::<prop::sample::Index>()) {
            authority(&data);
            let mut good = corpus("authority").swap_remove(0);
            authority(&[&good[..24], &data[..]].concat());
            let bent = at.index(good.len());
            good[bent] ^= 0x55;
            authority(&good);
            authority(&good[..bent]);
        }

        #[test]
        fn clients_that_start_well(after in frames(), which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>()) {
            let files = corpus("spdy");
            let good = which.get(&files);
            spdy(&[good, &after[..]].concat());
            let mut bent = good.clone();
            bent[at.index(good.len())] ^= 0x55;
            spdy(&bent);
            spdy(&good[..at.index(good.len())]);
        }
    }
}
