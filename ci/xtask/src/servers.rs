//! Checks that every gRPC server is built by `nacelle_proto::server`, which survives clients that cancel many calls.

use crate::Finding;

/// The file that builds servers for the others.
const BUILDER: &str = "proto/src/server.rs";

/// `files` are all Rust files: their paths and their texts.
pub fn check(files: &[(String, String)]) -> Vec<Finding> {
    let wrong = files.iter().filter(|(path, text)| path != BUILDER && builds_server(text));
    let rule = "builds a server of tonic: use nacelle_proto::server::builder";
    wrong.map(|(path, _)| Finding { place: path.clone(), rule: rule.to_owned() }).collect()
}

fn builds_server(text: &str) -> bool {
    text.lines().any(|line| line.contains(concat!("transport::", "Server")) && !line.trim_start().starts_with("//"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_one_builder() {
        let line = concat!("let server = tonic::transport::", "Server::builder();");
        let file = |path: &str, text: String| (path.to_owned(), text);
        let files = [file(BUILDER, line.to_owned()), file("a.rs", line.to_owned()), file("b.rs", format!("// {line}"))];
        let found: Vec<_> = check(&files).into_iter().map(|finding| finding.place).collect();
        assert_eq!(found, ["a.rs"]);
    }
}
