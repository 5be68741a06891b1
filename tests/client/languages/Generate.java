// Streams one completion, and asks for one that is refused.

import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.util.concurrent.TimeUnit;
import outrider.v1.InferenceOuterClass.GenerateRequest;
import outrider.v1.InferenceOuterClass.Sampling;
import outrider.v1.InferenceGrpc;

public class Generate {
  public static void main(String[] arguments) {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    GenerateRequest.Builder request =
        GenerateRequest.newBuilder()
            .setText(arguments[1])
            .setMaxTokens(8)
            .setSampling(Sampling.newBuilder().setTemperature(0.0));
    try {
      generate(channel, request);
      System.out.println();
      generate(channel, request.setSampling(Sampling.newBuilder().setTemperature(9.0)));
    } catch (StatusRuntimeException error) {
      System.out.println(error.getStatus().getCode() + " " + error.getStatus().getDescription());
    } finally {
      channel.shutdownNow();
    }
  }

  private static void generate(ManagedChannel channel, GenerateRequest.Builder request) {
    InferenceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(60, TimeUnit.SECONDS)
        .generate(request.build())
        .forEachRemaining(response -> System.out.print(response.getText()));
  }
}
