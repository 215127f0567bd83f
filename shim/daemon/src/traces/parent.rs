//! Reads the span of a client from the headers `traceparent` and `tracestate` of W3C Trace Context. Any local client may send
//! anything: what is invalid is ignored, and what is kept has a bounded size.

use http::HeaderMap;

/// The maximum size in bytes of the headers `tracestate` together; a longer state is ignored.
const MAX_STATE: usize = 512;

/// The length of `traceparent` in version 00.
const LENGTH: usize = 55;

/// The client's span, below which the daemon's is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientSpan {
    /// The trace. It is not all zeros.
    pub trace_id: [u8; 16],
    /// The span. It is not all zeros.
    pub span_id: [u8; 8],
    /// The client records the trace.
    pub is_sampled: bool,
    /// The state of other tracing systems, passed on unchanged.
    pub state: String,
}

impl ClientSpan {
    /// Returns the client's span; `None` if the request has none, or not exactly one valid.
    pub(super) fn from_headers(headers: &HeaderMap) -> Option<ClientSpan> {
        let mut parents = headers.get_all("traceparent").iter();
        let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
        let (trace_id, span_id, is_sampled) = parse_traceparent(parent.to_str().ok()?)?;
        Some(ClientSpan { trace_id, span_id, is_sampled, state: read_state(headers).unwrap_or_default() })
    }
}

/// Parses `VERSION-TRACE-SPAN-FLAGS`, all in lower-case hexadecimal. Later versions may have further fields, which are ignored.
fn parse_traceparent(text: &str) -> Option<([u8; 16], [u8; 8], bool)> {
    let (fields, rest) = text.split_at_checked(LENGTH)?;
    let mut parts = fields.split('-');
    let [version] = decode(parts.next()?)?;
    let (trace_id, span_id) = (decode(parts.next()?)?, decode(parts.next()?)?);
    let [flags] = decode(parts.next()?)?;
    let is_complete = parts.next().is_none() && if version == 0 { rest.is_empty() } else { is_further(rest) };
    let is_valid = is_complete && version != 0xff && trace_id != [0; 16] && span_id != [0; 8];
    is_valid.then_some((trace_id, span_id, flags & 1 == 1))
}

/// Returns whether this may follow the four known fields in a later version.
fn is_further(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with('-')
}

/// Decodes exactly `N` bytes of lower-case hexadecimal.
fn decode<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let is_lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (is_lower && hex::decode_to_slice(text, &mut bytes).is_ok()).then_some(bytes)
}

/// Returns the values of `tracestate` in their order; `None` if they are too long or not text.
fn read_state(headers: &HeaderMap) -> Option<String> {
    let mut state = String::new();
    for value in headers.get_all("tracestate") {
        let value = value.to_str().ok()?.trim();
        if state.len() + 1 + value.len() > MAX_STATE {
            return None;
        }
        if !state.is_empty() && !value.is_empty() {
            state.push(',');
        }
        state.push_str(value);
    }
    Some(state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(values: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in values {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    #[test]
    fn a_valid_parent_is_read_with_its_state() {
        let read = |values: &[(&'static str, &str)]| ClientSpan::from_headers(&headers(values));
        let span = read(&[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]).unwrap();
        assert_eq!(hex::encode(span.trace_id), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(hex::encode(span.span_id), "b7ad6b7169203331");
        assert!(span.is_sampled);
        assert_eq!(span.state, "a=1,b=2");
        let long = "x".repeat(MAX_STATE);
        assert_eq!(read(&[("traceparent", PARENT), ("tracestate", &long)]).unwrap().state, "");
        assert_eq!(read(&[("traceparent", PARENT), ("traceparent", PARENT)]), None);
        assert_eq!(read(&[("tracestate", "a=1")]), None);
        let flags = |flags: &str| format!("{}{flags}", &PARENT[..53]);
        assert!(!read(&[("traceparent", &flags("00"))]).unwrap().is_sampled);
        assert!(read(&[("traceparent", &flags("03"))]).unwrap().is_sampled);
    }

    #[test]
    fn an_invalid_parent_is_ignored() {
        let later = format!("cc{}-more", &PARENT[2..]);
        assert!(parse_traceparent(&later).is_some());
        for text in [
            String::new(),
            PARENT[..54].to_owned(),
            format!("{PARENT}-more"),
            format!("{PARENT}0"),
            format!("cc{}more", &PARENT[2..]),
            format!("ff{}", &PARENT[2..]),
            PARENT.to_uppercase(),
            PARENT.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            PARENT.replace("b7ad6b7169203331", &"0".repeat(16)),
            PARENT.replace("00-", "+1-"),
            PARENT.replace('-', "_"),
        ] {
            assert_eq!(parse_traceparent(&text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_parent_is_read_as_it_was_written(trace: [u8; 16], span: [u8; 8], flags: u8) {
            let text = format!("00-{}-{}-{flags:02x}", hex::encode(trace), hex::encode(span));
            let expected = (trace != [0; 16] && span != [0; 8]).then_some((trace, span, flags & 1 == 1));
            prop_assert_eq!(parse_traceparent(&text), expected);
        }

        #[test]
        fn no_header_is_read_as_another_one(text in "[0-9a-fA-F+ é-]{0,60}|00-[0-9a-g]{30,34}-[0-9a-g]{14,18}-[0-9a-g]{1,3}") {
            if let Some((trace, span, is_sampled)) = parse_traceparent(&text) {
                let rest = format!("-{}-{}-", hex::encode(trace), hex::encode(span));
                prop_assert_eq!(&text[2..53], rest);
                prop_assert_eq!(u8::from_str_radix(&text[53..55], 16).unwrap() & 1 == 1, is_sampled);
            }
        }

        #[test]
        fn the_state_is_bounded(values in proptest::collection::vec("[ -~]{0,300}", 0..5)) {
            let mut all = vec![("traceparent", PARENT)];
            all.extend(values.iter().map(|value| ("tracestate", value.as_str())));
            prop_assert!(ClientSpan::from_headers(&headers(&all)).unwrap().state.len() <= MAX_STATE);
        }
    }
}
