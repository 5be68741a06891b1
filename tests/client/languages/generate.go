// Streams one completion, and asks for one that is refused.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	pb "gen/outrider"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Debian's gRPC encodes by an older library, which knows no optional fields.
type codec struct{}

func (codec) Marshal(value interface{}) ([]byte, error) {
	return proto.Marshal(value.(proto.Message))
}

func (codec) Unmarshal(data []byte, value interface{}) error {
	return proto.Unmarshal(data, value.(proto.Message))
}

func (codec) Name() string { return "proto" }

func generate(client pb.InferenceClient, request *pb.GenerateRequest) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(response.Text)
	}
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{})))
	if err != nil {
		panic(err)
	}
	defer connection.Close()
	client := pb.NewInferenceClient(connection)
	tokens, greedy := uint32(8), 0.0
	request := &pb.GenerateRequest{
		Prompt:    &pb.GenerateRequest_Text{Text: os.Args[2]},
		MaxTokens: &tokens,
		Sampling:  &pb.Sampling{Temperature: &greedy},
	}
	if err := generate(client, request); err != nil {
		panic(err)
	}
	hot := 9.0
	request.Sampling.Temperature = &hot
	told := status.Convert(generate(client, request))
	fmt.Println(told.Code(), told.Message())
}
